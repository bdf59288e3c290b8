"""From files to batches: read the documents, tokenize them, store the tokens on disk, mix them, stream them."""
