"""The steps of a layer around its pipeline: input checks, routing, the shared expert, the latent width."""
