"""Training scripts for other frameworks. They are copied into emitted folders and run there, never imported."""
