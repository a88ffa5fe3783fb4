def sensitivity(*a, **k):
    raise NotImplementedError
