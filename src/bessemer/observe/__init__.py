"""Output of a run: progress, figures, profiles, alerts, trackers, and readers of other frameworks' runs."""
