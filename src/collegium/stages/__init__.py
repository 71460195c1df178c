"""What is around a pipeline in a layer: choosing experts, the shared expert, the latent width, and checks of input."""
