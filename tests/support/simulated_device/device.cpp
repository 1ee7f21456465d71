// What torch asks of a kind of device: the current ones, their streams and events, an allocator, storages.

#include <chrono>
#include <cstring>
#include <thread>

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace simulated {

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, static_cast<c10::DeviceIndex>(exchange_device(index(device)))};
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(index(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return handle(current_stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return handle(stream(index(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return handle(take_from_pool(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return handle(take_from_pool(index(device)));
  }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override {
    const int device = given.device_index();
    return handle(stream(device, exchange_stream(device, given.id())));
  }
  bool queryStream(const c10::Stream& given) const override {
    return behind(given).now().reached();
  }
  void synchronizeStream(const c10::Stream& given) const override {
    behind(given).now().wait();
    raise_failure();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize(device);
  }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Point;
    }
    *static_cast<Point*>(*event) = behind(on).now();
  }
  void block(void* event, const c10::Stream& waiting) const override {
    behind(waiting).wait_for(*static_cast<Point*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Point*>(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    static_cast<Point*>(event)->wait();
    raise_failure();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Point*>(event);
  }

 private:
  static int index(c10::Device device) {
    const int found = device.has_index() ? device.index() : current_device();
    TORCH_CHECK(found < kDevices, "simulated device: there are ", kDevices, " devices, and no ", found);
    return found;
  }
  static c10::Stream handle(const Stream& of) {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(of.device));
    return c10::Stream(c10::Stream::UNSAFE, device, of.id);
  }
  static Stream& behind(const c10::Stream& handle) {
    return stream(handle.device_index(), handle.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device()));
    if (nbytes == 0) {
      return {nullptr, device};
    }
    void* context = nullptr;
    void* address = take(nbytes, current_stream(device.index()), &context);
    return {address, context, &give_back, device};
  }
  void copy_data(void* into, const void* from, size_t nbytes) const override {
    current_stream(current_device()).submit([to = for_kernels(into), of = for_kernels(from), nbytes] {
      std::memcpy(to, of, nbytes);
    });
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct Hooks final : at::PrivateUse1HooksInterface {
  // Not "override": torch 2.6 has neither.
  bool isBuilt() const {
    return true;
  }
  bool isAvailable() const {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return is_used(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_registered(data);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::impl::VirtualGuardImpl guard(kType);
    const c10::Device before = guard.exchangeDevice(storage.device());
    c10::DataPtr data = allocator.allocate(nbytes);
    if (data && storage.data()) {
      allocator.copy_data(data.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    }
    guard.setDevice(before);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// Graphs: what is captured of a stream, to be done again by any.
std::vector<std::vector<Piece>>& graphs() {
  static auto* all = new std::vector<std::vector<Piece>>;
  return *all;
}

Stream& current() {
  return current_stream(current_device());
}

// Where a kernel finds memory of the host or of a device; notes whether the driver knows nothing of it.
char* reached(uint64_t address, size_t nbytes, bool& is_unknown) {
  auto* at = reinterpret_cast<char*>(address);
  if (char* inside = on_device(at)) {
    return inside;
  }
  const auto pinned = registered(at, nbytes);
  is_unknown |= !pinned;
  return pinned ? *pinned : at;
}

// As cudaMemcpyBatchAsync: one call for many copies. From and to memory that the driver does not know, the host waits.
int64_t copy_many(int64_t to, int64_t source, int64_t sizes, int64_t count) {
  struct Copy {
    char* to;
    const char* source;
    size_t nbytes;
  };
  std::vector<Copy> copies;
  bool is_unknown = false;
  for (int64_t number = 0; number < count; ++number) {
    const size_t nbytes = reinterpret_cast<const uint64_t*>(sizes)[number];
    char* into = reached(reinterpret_cast<const uint64_t*>(to)[number], nbytes, is_unknown);
    copies.push_back({into, reached(reinterpret_cast<const uint64_t*>(source)[number], nbytes, is_unknown), nbytes});
  }
  current().submit([copies = std::move(copies)] {
    for (const auto& each : copies) {
      std::memcpy(each.to, each.source, each.nbytes);
    }
  });
  if (is_unknown) {
    current().now().wait();
    raise_failure();
  }
  return 0;
}

TORCH_LIBRARY(simulated_device, m) {
  // Until then torch says of all memory that it is not pinned.
  m.def("init", []() -> void { at::globalContext().lazyInitDevice(kType); });
  m.def("current_device", []() -> int64_t { return current_device(); });
  m.def("exchange_device", [](int64_t device) -> int64_t {
    TORCH_CHECK(device >= 0 && device < kDevices, "simulated device: invalid device ordinal ", device);
    return exchange_device(static_cast<int>(device));
  });
  m.def("exchange_stream", [](int64_t device, int64_t id) -> int64_t { return exchange_stream(device, id); });
  m.def("current_stream", [](int64_t device) -> int64_t { return current_stream(device).id; });
  m.def("new_stream", [](int64_t device) -> int64_t { return take_from_pool(device).id; });
  m.def("is_used", [](int64_t device) -> bool { return is_used(device); });
  m.def("synchronize", [](int64_t device) -> void { synchronize(device); });
  m.def("stop_all", []() -> void { stop_all(); });
  m.def("set_longest_delay", [](int64_t microseconds) -> void { set_longest_delay(microseconds); });
  m.def("sleep", [](double seconds) -> void {
    current().submit([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  m.def("empty_cache", [](int64_t device) -> void { empty_cache(device); });
  m.def("memory_reserved", [](int64_t device) -> int64_t { return memory_reserved(device); });
  m.def("memory_limit", [](int64_t device) -> int64_t { return memory_limit(device); });
  m.def("set_memory_limit", [](int64_t device, int64_t nbytes) -> void { set_memory_limit(device, nbytes); });
  m.def("host_register", [](int64_t address, int64_t nbytes, int64_t flags) -> int64_t {
    return host_register(static_cast<uintptr_t>(address), nbytes, static_cast<unsigned>(flags));
  });
  m.def("host_unregister", [](int64_t address) -> int64_t { return host_unregister(address); });
  m.def("copy_many", [](int64_t to, int64_t source, int64_t sizes, int64_t count) -> int64_t {
    return copy_many(to, source, sizes, count);
  });
  m.def("registrations", []() -> int64_t { return registrations_count(); });
  m.def("is_capturing", []() -> bool { return current().is_capturing(); });
  m.def("begin_capture", []() -> void { current().begin_capture(); });
  m.def("end_capture", []() -> int64_t {
    graphs().push_back(current().end_capture());
    return static_cast<int64_t>(graphs().size()) - 1;
  });
  m.def("replay", [](int64_t graph) -> void {
    for (auto& piece : graphs()[graph]) {
      current().submit(piece);
    }
  });
}

}  // namespace

}  // namespace simulated
