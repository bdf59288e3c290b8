"""Steps that look at one document at a time: cleaning, filters, scores, redaction."""
