"""Steps that compare documents with each other or with evaluation sets."""
