"""What runs in the training process: the state, its capture, the guard, and the link to the agent."""
