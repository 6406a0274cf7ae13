"""Import and export of models of other toolkits, one file for each format."""
