"""The steps of a spec, run over a corpus: divided into parts, cached, resumed, reported."""
