from peclr_dali.pipelines.loader.buffers import PixelBuffers


def test_a_buffer_is_reused_only_when_nothing_refers_to_it() -> None:
    buffers = PixelBuffers((4, 8, 8, 3))
    first = buffers.tensor()
    address = first.data_ptr()
    first.fill_(7)
    view = first[1:3].permute(0, 3, 1, 2)
    del first
    other = buffers.tensor()
    other.fill_(9)
    assert other.data_ptr() != address  # a view of the first one is still in use
    assert (view == 7).all()
    del view
    assert buffers.tensor().data_ptr() == address


def test_no_more_buffers_exist_than_were_in_use_at_once() -> None:
    buffers = PixelBuffers((2, 4, 4, 3))
    addresses = set()
    for _ in range(5):
        one, two = buffers.tensor(), buffers.tensor()
        addresses |= {one.data_ptr(), two.data_ptr()}
        del one, two
    assert len(addresses) == 2
    kept = buffers.tensor().fill_(3)
    del buffers
    assert (kept == 3).all()
