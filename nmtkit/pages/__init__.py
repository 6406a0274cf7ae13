"""Templates, charts and the style sheet of HTML pages. A page is a single file and needs no network."""
