"""The site: the pages, the course, the interfaces and a run, as HTML that asks no other host."""
