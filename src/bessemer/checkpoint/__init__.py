"""Saves that can be trusted: sharded state, a manifest that is the commit, retention."""
