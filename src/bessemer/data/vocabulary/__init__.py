"""Where a tokenizer comes from and how good it is: training, loading other formats, audits, new tokens for a domain."""
