"""Packed data: WebDataset tar shards, and an index with the position of each sample.

A folder of shards holds

    shard-000000.tar ...   a sample's image, 000000012.jpg, then 000000012.json: its path, box and labels
    index.json             what there is, each shard's size, the tables' checksums; written last
    index/*.npy            where the images are, their sizes and checksums, boxes and labels: a row per sample
    SHA256SUMS             of the shards, for `sha256sum -c`

Shards that other programs wrote stay where they are: `foreign.py` writes index.json, which names their folder, and the
tables "offset", "size" and "lead", the bytes of headers before an image.

The tables are memory-mapped, and read once completely to compare their checksums. The shards are not mapped but read at
an offset: a failed read is then an error of one sample, while a failed page would end the process.
"""

from peclr_dali.pipelines.sources.shards.load import load_shards as load_shards
