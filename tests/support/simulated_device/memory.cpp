#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include <c10/util/Exception.h>

namespace simulated {

namespace {

constexpr size_t kReserved = size_t{4} << 30;  // of addresses; pages are taken when they are touched
constexpr size_t kPage = 4096;
constexpr int kPoison = 0xFD;

constexpr int kInvalidValue = 1;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr unsigned kKnownFlags = 0xF;

struct Block {
  int device;
  size_t begin;
  size_t room;
  size_t nbytes;
  Stream* stream;
};

class Arena {
 public:
  explicit Arena(int device) : device_(device) {
    const int file = memfd_create("simulated-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kReserved) == 0, "no memory for the simulated device");
    outside_ = map(file, PROT_NONE);
    inside_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  Block* take(size_t nbytes, Stream& on) {
    std::unique_lock lock(mutex_);
    const size_t room = rounded(nbytes);
    Block* found = cached(room, on);
    if (found == nullptr) {
      found = fresh(room, on);
    }
    if (found == nullptr) {
      lock.unlock();
      empty_cache();
      lock.lock();
      found = fresh(room, on);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, found != nullptr, "simulated device out of memory: ", nbytes, " bytes were asked for");
    found->nbytes = nbytes;
    return found;
  }

  void give_back(Block* block) {
    char* inside = inside_ + block->begin;
    const size_t nbytes = block->nbytes;
    block->stream->submit([inside, nbytes] { std::memset(inside, kPoison, nbytes); });
    std::lock_guard lock(mutex_);
    free_[block->stream].emplace(block->room, block);
  }

  void empty_cache() {
    synchronize(device_);
    std::lock_guard lock(mutex_);
    for (auto& [stream, blocks] : free_) {
      for (auto& [room, block] : blocks) {
        const size_t begin = (block->begin + kPage - 1) / kPage * kPage;
        const size_t end = (block->begin + room) / kPage * kPage;
        if (begin < end) {
          madvise(inside_ + begin, end - begin, MADV_REMOVE);
        }
        reserved_ -= room;
        all_.erase(block->begin);
        delete block;
      }
    }
    free_.clear();
    top_ = all_.empty() ? 0 : all_.rbegin()->first + all_.rbegin()->second->room;
  }

  char* outside(const Block* block) const {
    return outside_ + block->begin;
  }
  char* inside(const char* address) const {
    return address >= outside_ && address < outside_ + kReserved ? inside_ + (address - outside_) : nullptr;
  }

  size_t reserved() {
    std::lock_guard lock(mutex_);
    return reserved_;
  }
  size_t limit = kReserved;

 private:
  static char* map(int file, int protection) {
    void* mapped = mmap(nullptr, kReserved, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "no addresses for the simulated device");
    return static_cast<char*>(mapped);
  }

  static size_t rounded(size_t nbytes) {
    const size_t unit = nbytes < kPage ? 512 : kPage;
    return (nbytes + unit - 1) / unit * unit;
  }

  Block* cached(size_t room, Stream& on) {
    auto& blocks = free_[&on];
    auto found = blocks.lower_bound(room);
    if (found == blocks.end() || found->first > room + room / 4) {
      return nullptr;
    }
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }

  Block* fresh(size_t room, Stream& on) {
    size_t begin = top_;
    if (begin + room > limit) {  // look for a gap that emptying the cache has left
      begin = 0;
      for (auto& [other, block] : all_) {
        if (begin + room <= other) {
          break;
        }
        begin = other + block->room;
      }
      if (begin + room > limit) {
        return nullptr;
      }
    }
    Block* block = new Block{device_, begin, room, 0, &on};
    all_[begin] = block;
    top_ = std::max(top_, begin + room);
    reserved_ += room;
    return block;
  }

  const int device_;
  char* outside_;
  char* inside_;
  std::mutex mutex_;
  std::map<size_t, Block*> all_;
  std::map<Stream*, std::multimap<size_t, Block*>> free_;
  size_t top_ = 0;
  size_t reserved_ = 0;
};

Arena& arena(int device) {
  static std::array<Arena*, kDevices> all{new Arena(0), new Arena(1)};
  return *all[device];
}

struct Registration {
  size_t nbytes;
  char* pages;  // a mapping of its own of the same pages, so that they are the ones even when others are mapped there
};

std::mutex registrations_mutex;
std::map<uintptr_t, Registration>& registrations() {
  static auto* all = new std::map<uintptr_t, Registration>;
  return *all;
}

thread_local int last_error = 0;

int failed(int code) {
  last_error = code;
  return code;
}

bool is_mapped(uintptr_t address, size_t nbytes) {
  std::string resident((nbytes + kPage - 1) / kPage, 0);
  auto* pages = reinterpret_cast<unsigned char*>(resident.data());
  return mincore(reinterpret_cast<void*>(address / kPage * kPage), nbytes, pages) == 0;
}

// The first registration that ends behind ``address``.
std::map<uintptr_t, Registration>::iterator first_behind(uintptr_t address) {
  auto& all = registrations();
  auto found = all.upper_bound(address);
  if (found != all.begin()) {
    auto before = std::prev(found);
    if (before->first + before->second.nbytes > address) {
      return before;
    }
  }
  return found;
}

}  // namespace

void* take(size_t nbytes, Stream& on, void** context) {
  note_use(on.device);
  Arena& of_device = arena(on.device);
  Block* block = of_device.take(nbytes, on);
  *context = block;
  return of_device.outside(block);
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  arena(block->device).give_back(block);
}

void empty_cache(int device) {
  arena(device).empty_cache();
}

size_t memory_reserved(int device) {
  return arena(device).reserved();
}

size_t memory_limit(int device) {
  return arena(device).limit;
}

void set_memory_limit(int device, size_t nbytes) {
  arena(device).limit = nbytes == 0 ? kReserved : nbytes;
}

char* on_device(const void* address) {
  for (int device = 0; device < kDevices; ++device) {
    if (char* inside = arena(device).inside(static_cast<const char*>(address))) {
      return inside;
    }
  }
  return nullptr;
}

char* for_kernels(const void* address) {
  if (char* inside = on_device(address)) {
    return inside;
  }
  TORCH_CHECK(address == nullptr, "a kernel was given an address that is not the device's");
  return nullptr;
}

int host_register(uintptr_t address, size_t nbytes, unsigned flags) {
  if (address == 0 || nbytes == 0 || (flags & ~kKnownFlags) != 0 || !is_mapped(address, nbytes)) {
    return failed(kInvalidValue);
  }
  std::lock_guard lock(registrations_mutex);
  auto next = first_behind(address);
  if (next != registrations().end() && next->first < address + nbytes) {
    return failed(kAlreadyRegistered);
  }
  // A second mapping of the same pages; memory that is not shared has none, and is used where it is.
  void* pages = mremap(reinterpret_cast<void*>(address), 0, nbytes, MREMAP_MAYMOVE);
  if (pages == MAP_FAILED) {
    pages = reinterpret_cast<void*>(address);
  }
  registrations()[address] = {nbytes, static_cast<char*>(pages)};
  return 0;
}

int host_unregister(uintptr_t address) {
  std::lock_guard lock(registrations_mutex);
  auto found = registrations().find(address);
  if (found == registrations().end()) {
    return failed(kNotRegistered);
  }
  if (reinterpret_cast<uintptr_t>(found->second.pages) != address) {
    munmap(found->second.pages, found->second.nbytes);
  }
  registrations().erase(found);
  return 0;
}

size_t registrations_count() {
  std::lock_guard lock(registrations_mutex);
  return registrations().size();
}

std::optional<char*> registered(const void* address, size_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(registrations_mutex);
  auto found = first_behind(begin);
  if (found == registrations().end() || found->first >= begin + nbytes) {
    return std::nullopt;
  }
  const auto& [at, registration] = *found;
  TORCH_CHECK(
      at <= begin && begin + nbytes <= at + registration.nbytes,
      "simulated device: invalid argument: a copy across what is registered");
  return registration.pages + (begin - at);
}

bool is_registered(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(registrations_mutex);
  auto found = first_behind(at);
  return found != registrations().end() && found->first <= at;
}

int take_last_error() {
  return std::exchange(last_error, 0);
}

}  // namespace simulated
