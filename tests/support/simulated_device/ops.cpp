// The operations of the simulated device. Each is queued on the current stream, and computed by torch's kernels for the
// CPU in the thread of that stream, on the mapping of the device's memory that kernels use.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace simulated {

namespace {

using at::Tensor;
using c10::IValue;

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Stream& stream_of(const Tensor& tensor) {
  return current_stream(tensor.device().index());
}

// A launch finds the error that an earlier call has left behind, as CUDA's do.
void launch(Stream& on, Piece piece) {
  const int code = take_last_error();
  TORCH_CHECK(code == 0, "simulated device error: ", code, ", of an earlier call");
  on.submit([piece = std::move(piece)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    piece();
  });
}

// The same elements, as a tensor that kernels of the CPU can work on.
Tensor for_kernels(const Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  void* address = tensor.numel() == 0 ? nullptr : simulated::for_kernels(tensor.const_data_ptr());
  Tensor same = at::from_blob(
      address, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

// ---- what torch cannot do without ----

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, c10::GetAllocator(kType), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kType), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage_at(
    Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}

Tensor as_strided(
    const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// ---- copies ----

void copy_between_devices(const Tensor& into, const Tensor& from) {
  Stream& there = stream_of(into);
  Stream& here = stream_of(from);
  here.wait_for(there.now());
  launch(here, [to = for_kernels(into), of = for_kernels(from)] { to.copy_(of); });
  there.wait_for(here.now());
}

// Contiguous, of one dtype, one of them on the host. From and to memory that the driver does not know, the host waits.
void copy_with_host(const Tensor& into, const Tensor& from, bool non_blocking) {
  const bool to_host = !is_ours(into);
  Stream& on = stream_of(to_host ? from : into);
  const void* on_host = to_host ? into.const_data_ptr() : from.const_data_ptr();
  const size_t nbytes = into.nbytes();
  const auto pinned = registered(on_host, nbytes);
  char* reached = pinned ? *pinned : static_cast<char*>(const_cast<void*>(on_host));
  char* on_device = simulated::for_kernels(to_host ? from.const_data_ptr() : into.const_data_ptr());
  char* to = to_host ? reached : on_device;
  launch(on, [to, of = to_host ? on_device : reached, nbytes] { std::memcpy(to, of, nbytes); });
  if (!pinned || !non_blocking) {
    on.now().wait();
    raise_failure();
  }
}

// As torch's own for CUDA does: what is not just bytes is made so first, on the device where the copy does not block,
// on the host where it does.
void copy_converting(const Tensor& into, const Tensor& from, bool non_blocking) {
  const bool converts_first = is_ours(from) == non_blocking;
  const auto dtype = converts_first ? into.scalar_type() : from.scalar_type();
  const Tensor given = from.to(dtype).expand_as(into).contiguous();
  const bool is_plain = into.is_contiguous() && into.scalar_type() == dtype;
  const Tensor taken = is_plain ? into : at::empty_like(into, into.options().dtype(dtype), at::MemoryFormat::Contiguous);
  taken.copy_(given, non_blocking);
  if (!taken.is_same(into)) {
    into.copy_(taken, non_blocking);
  }
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  const Tensor from = given.sizes() == self.sizes() ? given : given.expand_as(self);
  if (self.numel() == 0 || self.is_same(from)) {
    return self;
  }
  const bool is_plain = self.scalar_type() == from.scalar_type() && self.is_contiguous() && from.is_contiguous();
  if (self.device() == from.device()) {
    launch(stream_of(self), [into = for_kernels(self), of = for_kernels(from)] { into.copy_(of); });
  } else if (is_ours(self) && is_ours(from)) {
    copy_between_devices(self, from);
  } else if (!is_plain) {
    copy_converting(self, from, non_blocking);
  } else {
    copy_with_host(self, from, non_blocking);
    // CUDA's does these on the bytes that are there now, at once, whether or not they have come.
    if (self.is_conj() != from.is_conj()) {
      self.conj_physical_();
    }
    if (self.is_neg() != from.is_neg()) {
      self.neg_();
    }
  }
  return self;
}

// Halves go by way of float in CUDA's fused kernel: what is not a number comes out with other bits.
void copy_in_one_launch(at::TensorList self, at::TensorList from) {
  struct Part {
    char* to;
    const char* of;
    size_t nbytes;
  };
  std::vector<Part> parts;
  parts.reserve(self.size());
  for (size_t number = 0; number < self.size(); ++number) {
    const Tensor& into = self[number];
    if (into.numel() != 0) {
      const char* source = simulated::for_kernels(from[number].const_data_ptr());
      parts.push_back({simulated::for_kernels(into.const_data_ptr()), source, into.nbytes()});
    }
  }
  const auto dtype = self[0].scalar_type();
  launch(stream_of(self[0]), [parts = std::move(parts), dtype] {
    for (const Part& part : parts) {
      if (!at::isReducedFloatingType(dtype)) {
        std::memcpy(part.to, part.of, part.nbytes);
        continue;
      }
      const auto elements = static_cast<int64_t>(part.nbytes / c10::elementSize(dtype));
      const Tensor given = at::from_blob(const_cast<char*>(part.of), {elements}, at::TensorOptions(dtype));
      at::from_blob(part.to, {elements}, at::TensorOptions(dtype)).copy_(given.to(at::kFloat));
    }
  });
}

void foreach_copy_(at::TensorList self, at::TensorList from, bool non_blocking) {
  bool is_fused = !self.empty();
  for (size_t number = 0; number < self.size() && is_fused; ++number) {
    const Tensor& into = self[number];
    const Tensor& of = from[number];
    is_fused = into.device() == self[0].device() && of.device() == into.device() && of.sizes() == into.sizes() &&
        of.scalar_type() == into.scalar_type() && into.scalar_type() == self[0].scalar_type() &&
        into.is_contiguous() && of.is_contiguous();
  }
  if (is_fused) {
    copy_in_one_launch(self, from);
    return;
  }
  for (size_t number = 0; number < self.size(); ++number) {
    self[number].copy_(from[number], non_blocking);
  }
}

// ---- everything else ----

// Calls ``change`` with each tensor in a value, and gives the value with what that returned.
template <typename Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) {
      changed.push_back(change(each));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      changed.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<IValue> arguments;
  c10::Device device;

  // The arguments with ``change`` made to the tensors of the device, which are on ``other`` then.
  template <typename Change>
  std::vector<IValue> on(c10::Device other, const Change& change) const {
    std::vector<IValue> changed;
    for (const IValue& argument : arguments) {
      if (argument.isDevice() && argument.toDevice().type() == kType) {
        changed.emplace_back(other);
      } else {
        changed.push_back(with_tensors(argument, change));
      }
    }
    return changed;
  }

  std::vector<IValue> on_cpu() const {
    return on(at::kCPU, [](const Tensor& each) { return is_ours(each) ? for_kernels(each) : each; });
  }
};

// What is returned is what was given: operations in place, and those with an out argument. nullopt: it is not.
std::optional<std::vector<IValue>> returned_arguments(const Call& call) {
  const auto& schema = call.op.schema();
  std::vector<IValue> found;
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      return std::nullopt;
    }
    for (size_t number = 0; number < call.arguments.size(); ++number) {
      const auto* other = schema.arguments()[number].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        found.push_back(call.arguments[number]);
        break;
      }
    }
  }
  return found;
}

// The call on tensors without memory, which finds shapes; what it returned, and its arguments. nullopt: torch cannot.
struct Shapes {
  std::vector<IValue> results;
  std::vector<IValue> arguments;
};

std::optional<Shapes> shapes_of(const Call& call) {
  auto arguments = call.on(at::kMeta, [](const Tensor& each) {
    const auto options = each.options().device(at::kMeta);
    return is_ours(each) ? at::empty_strided(each.sizes(), each.strides(), options) : each;
  });
  auto stack = arguments;
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    call.op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return Shapes{std::move(stack), std::move(arguments)};
}

// New tensors for what is returned; nullopt where torch cannot say their shapes, or they are no tensors.
std::optional<std::vector<IValue>> new_results(const Call& call) {
  for (const auto& returned : call.op.schema().returns()) {
    if (returned.alias_info() != nullptr || returned.type()->kind() != c10::TypeKind::TensorType) {
      return std::nullopt;
    }
  }
  auto shapes = shapes_of(call);
  if (!shapes) {
    return std::nullopt;
  }
  for (IValue& result : shapes->results) {
    const Tensor shape = result.toTensor();
    result = !shape.defined()
        ? Tensor()
        : at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(call.device));
  }
  return std::move(shapes->results);
}

// Out arguments that are still empty get their shapes before the call, for kernels cannot give them memory.
void resize_outs(const Call& call) {
  const auto& declared = call.op.schema().arguments();
  std::optional<Shapes> shapes;
  for (size_t number = 0; number < declared.size(); ++number) {
    const IValue& out = call.arguments[number];
    const bool is_out = declared[number].kwarg_only() && declared[number].alias_info() != nullptr;
    if (!is_out || !out.isTensor() || !is_ours(out.toTensor()) || out.toTensor().numel() != 0) {
      continue;
    }
    if (!shapes && !(shapes = shapes_of(call))) {
      return;
    }
    out.toTensor().resize_(shapes->arguments[number].toTensor().sizes());
  }
}

void queue(const Call& call, const std::vector<IValue>& new_ones) {
  // What is a number on the host goes by value, as it is now.
  auto arguments = call.on(at::kCPU, [](const Tensor& each) {
    return is_ours(each) ? for_kernels(each) : each.defined() ? each.clone() : each;
  });
  std::vector<Tensor> into;
  for (const IValue& each : new_ones) {
    into.push_back(for_kernels(each.toTensor()));
  }
  launch(current_stream(call.device.index()), [op = call.op, arguments, into] {
    std::vector<IValue> stack = arguments;
    op.callBoxed(&stack);
    for (size_t number = 0; number < into.size(); ++number) {
      if (into[number].defined()) {
        into[number].copy_(stack[number].toTensor());
      }
    }
  });
}

// On the calling thread, when the current stream has done what it was given.
std::vector<IValue> compute_now(const Call& call) {
  current_stream(call.device.index()).now().wait();
  raise_failure();
  auto stack = call.on_cpu();
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    call.op.callBoxed(&stack);
  }
  for (IValue& result : stack) {
    result = with_tensors(result, [&](const Tensor& each) { return each.defined() ? each.to(call.device) : each; });
  }
  return stack;
}

std::optional<c10::Device> device_of(const std::vector<IValue>& arguments) {
  std::optional<c10::Device> found;
  for (const IValue& argument : arguments) {
    with_tensors(argument, [&](const Tensor& each) {
      if (is_ours(each) && !found) {
        found = each.device();
      }
      return each;
    });
    if (argument.isDevice() && argument.toDevice().type() == kType && !found) {
      found = argument.toDevice().has_index() ? argument.toDevice() : c10::Device(kType, current_device());
    }
  }
  return found;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Call call{op, {stack->end() - static_cast<int64_t>(count), stack->end()}, c10::Device(kType, current_device())};
  call.device = device_of(call.arguments).value_or(call.device);
  const c10::DeviceGuard guard(call.device);
  torch::jit::drop(*stack, count);
  if (auto given = returned_arguments(call)) {
    resize_outs(call);
    queue(call, {});
    stack->insert(stack->end(), given->begin(), given->end());
    return;
  }
  for (const auto& returned : schema.returns()) {
    TORCH_CHECK(returned.alias_info() == nullptr, "simulated device: ", op.operator_name(), " would need a kernel");
  }
  auto results = new_results(call);
  if (results) {
    queue(call, *results);
  } else {
    results = compute_now(call);
  }
  stack->insert(stack->end(), results->begin(), results->end());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("copy_", &copy_);
  m.impl("_foreach_copy_", &foreach_copy_);
  // torch has one for all devices, which has no kernel for this one.
  m.impl("conj_physical_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

}  // namespace simulated
