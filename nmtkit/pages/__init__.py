"""The pages that nmtkit makes: one style sheet, charts and templates; a page needs no network and no other file."""
