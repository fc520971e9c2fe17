"""Gaussian messages on the factor graph of a network; no gradients are taken.

After "Scalable approximate message passing for Bayesian neural networks".
"""
