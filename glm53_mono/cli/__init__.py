"""The `glm53-mono` command: one file a sub-command."""
