"""Model families: configs and weights from and to Hugging Face folders, without transformers."""
