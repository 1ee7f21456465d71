"""The mutations of the device path. Each removes one wait, one hold, or one check."""

from __future__ import annotations

from typing import NamedTuple

_DEVICE_COPY = "asyncckpt/staging/device_copy.py"
_DEVICES = "asyncckpt/devices/kinds.py"
_PINNED = "asyncckpt/devices/pinned.py"
_PINNERS = "asyncckpt/devices/pinners.py"
_BUFFER = "asyncckpt/staging/buffer.py"
_CAPTURES = "asyncckpt/devices/captures.py"
_STREAMED = "asyncckpt/weights/streamed_copies.py"

_ON_DEVICE = "tests/staging/test_on_device.py"
_OVERLAP = "tests/staging/test_device_overlap.py"
_MEMORY = "tests/staging/test_device_memory.py"
_WEIGHTS = "tests/weights/test_device_weights.py"
_BUFFERS = "asyncckpt/loading/device_buffers.py"
_LOADS = "tests/loading/test_device_loads.py"


class Mutation(NamedTuple):
    """A change to a file: ``new`` replaces ``old``, which occurs once. Then one of ``tests`` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "copies wait for compute",
        _DEVICE_COPY,
        "self._stream.wait_event(ready[self._device])",
        "pass",
        f"{_OVERLAP}::test_copies_wait_for_what_was_computed",
    ),
    Mutation(
        "the fence",
        _DEVICE_COPY,
        "return lambda: kind.current_stream(device).wait_event(last)",
        "return lambda: None",
        f"{_OVERLAP}::test_a_guarded_step_comes_after_the_copies",
    ),
    Mutation(
        "the fence is behind all copies",
        _DEVICE_COPY,
        "self.last, self._commands = event,",
        "self.last, self._commands = self.last or event,",
        f"{_OVERLAP}::test_a_guarded_step_comes_after_the_copies",
    ),
    Mutation(
        "a stream is given no more than it takes",
        _DEVICE_COPY,
        "self._commands + _cost(self.left[0]) <= _MOST_COMMANDS",
        "True",
        f"{_OVERLAP}::test_copies_leave_room_for_others_to_launch",
    ),
    Mutation(
        "staged when the copies have come",
        _DEVICE_COPY,
        "event.synchronize()\n",
        "pass\n",
        f"{_OVERLAP}::test_copies_wait_for_what_was_computed",
    ),
    Mutation(
        "a failed queue waits for what copies",
        _DEVICE_COPY,
        "self._kind.record(self._stream).synchronize()",
        "pass",
        f"{_OVERLAP}::test_a_copy_that_cannot_be_queued",
    ),
    Mutation(
        "copies are queued on the side stream",
        _DEVICE_COPY,
        "with self._kind.use(self._device, self._stream):\n            self._stream.wait",
        "with self._kind.use(self._device):\n            self._stream.wait",
        f"{_OVERLAP} {_ON_DEVICE}",
    ),
    Mutation(
        "a large tensor is copied part by part",
        _DEVICE_COPY,
        "addresses[0] += self._offset",
        "pass",
        f"{_MEMORY}::test_large_tensors_arrive_in_chunks",
    ),
    Mutation(
        "what the driver refuses is copied in another way",
        _DEVICE_COPY,
        "if self._copy_many(self._to, addresses, self._sizes):\n                return",
        "self._copy_many(self._to, addresses, self._sizes)\n            return",
        "tests/staging/test_device_copy.py",
    ),
    Mutation(
        "a lazy conjugate is carried out on the device",
        _DEVICE_COPY,
        "tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()",
        "tensor.is_contiguous()",
        f"{_ON_DEVICE}::test_the_same_bytes_as_from_the_host",
    ),
    Mutation(
        "the ready event is of the caller's stream",
        _DEVICES,
        "events[device] = kind.record(kind.current_stream(device))",
        "events[device] = kind.record(kind.new_stream(device))",
        f"{_OVERLAP}::test_copies_wait_for_what_was_computed",
    ),
    Mutation(
        "an unknown device is waited for",
        _DEVICES,
        "unknown.synchronize(device)",
        "pass",
        f"{_OVERLAP}::test_a_device_that_is_not_known_is_waited_for",
    ),
    Mutation(
        "what was queued anywhere is waited for",
        _DEVICES,
        "self._module.synchronize(device)",
        "pass",
        f"{_WEIGHTS}::test_parameters_go_off_the_device_and_come_back",
    ),
    Mutation(
        "all unstaged saves hold a step back",
        "asyncckpt/engine/saves.py",
        "copying = [save for save in saves if not save.staged()]",
        "copying = [save for save in list(saves)[-1:] if not save.staged()]",
        f"{_OVERLAP}::test_a_guarded_step_waits_for_older_saves_too",
    ),
    Mutation(
        "the memory of parameters is held on to",
        "asyncckpt/engine/saves.py",
        "tensors = held_memory(captured.tensors) if copier.overlaps else captured.tensors",
        "tensors = captured.tensors",
        f"{_OVERLAP}::test_a_parameter_gets_other_memory",
    ),
    Mutation(
        "offloading waits for copies",
        "examples/offload.py",
        "wait_for_copies(_COPY_LIMIT_S)",
        "pass",
        f"{_OVERLAP}::test_offloading_waits_for_copies",
    ),
    Mutation(
        "no save in a capture",
        _CAPTURES,
        "if is_capturing():\n        raise",
        "if False:\n        raise",
        f"{_OVERLAP}::test_nothing_is_copied_while_a_graph_is_captured",
    ),
    Mutation(
        "what comes one by one is copied on its device first",
        _STREAMED,
        "plain.to(dtype, copy=True, memory_format=torch.contiguous_format)",
        "plain.to(dtype)",
        f"{_WEIGHTS}::test_what_comes_one_by_one_may_use_the_same_memory_on_any_stream",
    ),
    Mutation(
        "that copy is waited for",
        _STREAMED,
        "kind.record(kind.current_stream(device)).synchronize()",
        "pass",
        f"{_WEIGHTS}::test_what_comes_one_by_one_may_use_the_same_memory_on_any_stream",
    ),
    Mutation(
        "its memory is held until it has gone to the host",
        _STREAMED,
        "                event.synchronize()\n",
        "                pass\n",
        f"{_WEIGHTS}::test_what_comes_one_by_one_may_use_the_same_memory_on_any_stream",
    ),
    Mutation(
        "no publication in a capture",
        "asyncckpt/weights/buffer.py",
        "        check_not_capturing()\n",
        "",
        f"{_WEIGHTS}::test_nothing_is_published_while_a_graph_is_captured",
    ),
    Mutation(
        "no guarded step in a capture",
        _CAPTURES,
        "if copies_are_under_way:",
        "if False:",
        f"{_OVERLAP}::test_a_guarded_step_that_is_captured",
    ),
    Mutation(
        "ranges of pinned memory end at cuts",
        _PINNED,
        "*sorted(cut // PAGE * PAGE for cut in cuts)",
        "*range(0, nbytes, PAGE * 300)",
        f"{_MEMORY}::test_in_pieces_that_no_copy_crosses",
    ),
    Mutation(
        "a stale registration is replaced",
        _PINNED,
        "            pinner.unregister(address)\n            code",
        "            code",
        f"{_ON_DEVICE}::test_a_stale_registration_is_replaced",
    ),
    Mutation(
        "the driver's last error is taken",
        _PINNERS,
        "            with contextlib.suppress(RuntimeError):\n                torch.ones((), device=self._type)\n",
        "            pass\n",
        f"{_ON_DEVICE}::test_a_refused_registration_leaves_no_error_and_is_no_harm",
    ),
    Mutation(
        "memory is unpinned before it goes",
        _PINNED,
        "self._unpin(0)",
        "pass",
        f"{_MEMORY}::test_memory_that_goes_is_not_pinned_any_more",
    ),
    Mutation(
        "tensors that are elsewhere now are seen",
        "asyncckpt/planning/forms.py",
        "if moved.value or self.devices is None:",
        "if self.devices is None:",
        f"{_ON_DEVICE}::test_tensors_that_move_between_saves",
    ),
    Mutation(
        "a buffer is not read into before it is sent",
        _BUFFERS,
        """        self._wait()
        self.views, at = [], 0
""",
        """        self.views, at = [], 0
""",
        f"{_LOADS}::test_all_of_a_state",
    ),
    Mutation(
        "a load ends when all is sent",
        _BUFFERS,
        """            all_of_them.callback(self.views.clear)
            self._wait()
""",
        """            all_of_them.callback(self.views.clear)
""",
        f"{_LOADS}::test_all_of_a_state",
    ),
    Mutation(
        "no graph gets a load",
        "asyncckpt/loading/read_requests.py",
        "if is_capturing() and not all(each.tensor.is_cpu for each in becoming):",
        "if False:",
        f"{_LOADS}::test_nothing_is_loaded_while_a_graph_is_captured",
    ),
)
