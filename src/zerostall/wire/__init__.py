"""Messages between processes, the socket that carries them, and how to find or start the node's agent."""
