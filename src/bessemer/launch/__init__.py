"""Launches runs on Slurm, Kubernetes, SkyPilot, Modal, SSH hosts or this machine; emits them for other frameworks."""
