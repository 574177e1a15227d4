"""A GPU of make-believe, to count what a training step does on a card without one.

    python -m MODULE, in a process with `environment.card_environment()`, and in it:

    with card.card() as gpu:
        step(batch.to("cuda"))
    gpu.waits, gpu.copies, gpu.mixed, gpu.operators

Streams do nothing, so races are not seen, and CUDA's own kernels do not run. Times on it mean nothing.
"""
