"""Where a run goes: Slurm, Kubernetes, SkyPilot, Modal, machines over SSH, or the queue of one box."""
