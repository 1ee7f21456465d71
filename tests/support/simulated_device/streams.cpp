#include "streams.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>

#include <ATen/Parallel.h>

extern "C" void omp_set_num_threads(int);

namespace simulated {

namespace {

std::atomic<int64_t> longest_delay{400};
std::atomic<bool> forked{false};  // a child of fork has none of the threads, and all of the locks as they were
std::array<std::atomic<bool>, kDevices> used{};

std::mutex failure_mutex;
// As CUDA has it: a stream takes so many calls. Who gives it one more waits, and lets nobody else launch meanwhile.
constexpr size_t kMostPieces = 1024;
std::mutex launch_mutex;
std::string failure;

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevices> streams_now{};

// Never destroyed: threads may be using them as the process ends.
using Streams = std::array<std::array<std::unique_ptr<Stream>, kStreams>, kDevices>;

Streams make_streams() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  Streams made;
  for (int device = 0; device < kDevices; ++device) {
    for (int64_t id = 0; id < kStreams; ++id) {
      made[device][id] = std::make_unique<Stream>(device, id);
    }
  }
  return made;
}

Streams& streams() {
  static Streams* all = new Streams(make_streams());
  return *all;
}

// Most pieces begin at once, so that the order in which streams come to something changes all the time.
void delay(std::minstd_rand& chance) {
  const int64_t longest = longest_delay;
  if (longest > 0 && chance() % 8 == 0) {
    const int64_t most = chance() % 64 == 0 ? 8 * longest : longest;
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % most));
  }
}

}  // namespace

bool Point::reached() const {
  if (stream == nullptr || forked) {
    return true;
  }
  std::lock_guard lock(stream->mutex_);
  return stream->done_ >= ticket;
}

void Point::wait() const {
  if (stream == nullptr || forked) {
    return;
  }
  std::unique_lock lock(stream->mutex_);
  stream->changed_.wait(lock, [this] { return stream->done_ >= ticket; });
}

void Stream::submit(Piece piece) {
  if (forked) {
    return;
  }
  note_use(device);
  std::lock_guard launching(launch_mutex);
  std::unique_lock lock(mutex_);
  if (capturing_) {
    captured_.push_back(std::move(piece));
    return;
  }
  if (stopped_) {
    lock.unlock();
    piece();
    return;
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { work(); });
  }
  changed_.wait(lock, [this] { return pieces_.size() < kMostPieces; });
  pieces_.push_back(std::move(piece));
  ++given_;
  changed_.notify_all();
}

Point Stream::now() {
  std::lock_guard lock(mutex_);
  return {this, given_};
}

void Stream::wait_for(Point point) {
  if (!point.reached()) {
    submit([point] { point.wait(); });
  }
}

void Stream::begin_capture() {
  std::lock_guard lock(mutex_);
  capturing_ = true;
}

std::vector<Piece> Stream::end_capture() {
  std::lock_guard lock(mutex_);
  capturing_ = false;
  return std::exchange(captured_, {});
}

bool Stream::is_capturing() {
  std::lock_guard lock(mutex_);
  return capturing_;
}

void Stream::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable() && !forked) {
    thread_.join();
  }
}

void Stream::work() {
  pthread_setname_np(pthread_self(), ("sim-" + std::to_string(device) + "-" + std::to_string(id)).c_str());
  at::get_num_threads();  // which sets it, once for each thread, to what is overridden here
  omp_set_num_threads(1);
  std::minstd_rand chance{std::random_device{}()};
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || !pieces_.empty(); });
    if (pieces_.empty()) {
      return;
    }
    Piece piece = std::move(pieces_.front());
    pieces_.pop_front();
    lock.unlock();
    delay(chance);
    try {
      piece();
    } catch (const std::exception& error) {
      std::lock_guard failing(failure_mutex);
      if (failure.empty()) {
        failure = error.what();
      }
    }
    piece = nullptr;  // before it counts as done: it may hold on to memory of the host
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

int current_device() {
  return device_now;
}

int exchange_device(int device) {
  return std::exchange(device_now, device);
}

Stream& stream(int device, int64_t id) {
  return *streams()[device][id];
}

Stream& current_stream(int device) {
  return stream(device, streams_now[device]);
}

int64_t exchange_stream(int device, int64_t id) {
  return std::exchange(streams_now[device], id);
}

Stream& take_from_pool(int device) {
  static std::array<std::atomic<uint64_t>, kDevices> taken{};
  note_use(device);
  return stream(device, 1 + taken[device]++ % (kStreams - 1));
}

bool is_used(int device) {
  return used[device];
}

void note_use(int device) {
  used[device] = true;
}

void synchronize(int device) {
  for (auto& each : streams()[device]) {
    each->now().wait();
  }
  raise_failure();
}

void raise_failure() {
  std::lock_guard lock(failure_mutex);
  if (!failure.empty()) {
    throw std::runtime_error("simulated device: " + std::exchange(failure, {}));
  }
}

void stop_all() {
  for (auto& of_device : streams()) {
    for (auto& each : of_device) {
      each->stop();
    }
  }
}

void set_longest_delay(int64_t microseconds) {
  longest_delay = microseconds;
}

}  // namespace simulated
