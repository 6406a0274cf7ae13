"""Models of other toolkits, one file for each: what nmtkit writes for them, and what it reads."""
