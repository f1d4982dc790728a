"""Time laws, schedules, masking and objectives. Imports torch only."""
