"""The cluster's manager: hears every agent, decides what is clean and where copies go. Training never waits for it."""
