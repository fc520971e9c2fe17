"""What a shell or a server runs: the command line, `serve`, `monitor`, `export`, an evaluation's page."""
