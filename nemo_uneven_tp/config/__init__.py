"""The run configuration: schema, composition by Hydra, checks, and the plan request."""
