"""Many ranks beside torch.distributed.checkpoint, and what a save at every step costs them."""
