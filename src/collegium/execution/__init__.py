"""Running a layer's calls: ranks, workspaces, chunks and recorded launches around the steps of a pass."""
