"""Runs steps on a device: input batch, model runner, sampler."""
