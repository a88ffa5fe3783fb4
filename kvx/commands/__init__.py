"""The commands of ``kvx``, one short file each: a dataclass of settings and ``run(settings, out) -> Outcome``."""
