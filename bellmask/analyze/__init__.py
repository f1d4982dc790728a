"""The paper's figures and tables as measurements, and their exact versions on toy sources."""
