"""Mappers: closed-form, linear cache maps, one short file a method."""

from kvx.mappers.base import CacheMap, Mapper
from kvx.mappers.chain import chain
from kvx.mappers.controls import constant, random
from kvx.mappers.full_head import full_head
from kvx.mappers.head_matched import head_matched
from kvx.mappers.identity import identity
from kvx.mappers.low_rank import low_rank

__all__ = ["CacheMap", "Mapper", "chain", "constant", "full_head", "head_matched", "identity", "low_rank", "random"]
