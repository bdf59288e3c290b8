"""Verified checkpoints: sharded state, a manifest that is the commit, retention, remote copies."""
