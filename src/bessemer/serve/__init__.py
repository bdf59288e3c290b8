"""`bessemer serve`: a model behind OpenAI's HTTP API."""
