"""A fleet on a virtual clock: the real gateway, router, scheduler and block pool; the model is a formula."""
