"""Run folders to curves, tables, pages; reads files, needs no model."""
