"""What a curation step can be told: one section of the spec for each named step."""
