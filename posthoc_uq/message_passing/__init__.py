"""Message passing on the factor graph of a network: messages are Gaussians in natural parameters, and no gradients are
taken. After "Scalable approximate message passing for Bayesian neural networks".
"""
