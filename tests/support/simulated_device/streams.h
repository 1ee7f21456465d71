// Streams of the simulated device: each is a thread that does its pieces of work in order, each after a random delay.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // of each device: the default one, and a pool that new ones are taken from in turns

using Piece = std::function<void()>;

class Stream;

// What an event records: the moment at which a stream has done all that it was given until then.
struct Point {
  Stream* stream = nullptr;
  uint64_t ticket = 0;

  bool reached() const;
  void wait() const;  // on the host, or in a piece of another stream
};

class Stream {
 public:
  Stream(int device, int64_t id) : device(device), id(id) {}

  // Queue a piece; while a graph is captured, it becomes a part of that instead.
  void submit(Piece piece);
  // The moment at which all is done that was given so far.
  Point now();
  void wait_for(Point point);

  void begin_capture();
  std::vector<Piece> end_capture();
  bool is_capturing();

  // Do all that is left, and end the thread; what comes later is done at once, by whoever submits it.
  void stop();

  const int device;
  const int64_t id;

 private:
  friend struct Point;
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> pieces_;
  uint64_t given_ = 0;
  uint64_t done_ = 0;
  bool stopped_ = false;
  bool capturing_ = false;
  std::vector<Piece> captured_;
  std::thread thread_;
};

int current_device();  // of the calling thread, as its current streams are
int exchange_device(int device);
Stream& stream(int device, int64_t id);
Stream& current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
Stream& take_from_pool(int device);

// Whether anything was ever asked of the device: CUDA would have a context there.
bool is_used(int device);
void note_use(int device);

// Wait for all streams of a device; raises what went wrong in any since it was last asked (as CUDA does).
void synchronize(int device);
void raise_failure();
void stop_all();

void set_longest_delay(int64_t microseconds);

}  // namespace simulated
