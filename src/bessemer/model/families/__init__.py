"""Model families: descriptions and weights from and to Hugging Face model folders, without transformers."""
