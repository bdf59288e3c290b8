"""Objectives of pre-training as pure rewritings of a batch: masked, denoise, prefix, infill, and mixes of them."""
