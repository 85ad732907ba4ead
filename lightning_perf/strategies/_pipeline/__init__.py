"""What `PipelineStrategy` is made of."""
