"""The live page of runs: a columnar cache of their journals, the server, the page, control and export."""
