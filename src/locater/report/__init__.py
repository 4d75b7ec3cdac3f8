"""Documents as tables in the terminal, HTML pages and notebook displays: one file per kind of document."""
