// Memory of the simulated devices, and what they know of the host's.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <c10/core/DeviceType.h>

#include "streams.h"

namespace simulated {

// What torch calls their type.
constexpr auto kType = c10::DeviceType::PrivateUse1;

// Memory of a device, as a caching allocator gives it: what is freed is poisoned in the order of the stream that it
// was taken on, and taken again on that stream at once. Throws c10::OutOfMemoryError.
void* take(size_t nbytes, Stream& on, void** context);
void give_back(void* context);
// Give back what is cached; waits for the device.
void empty_cache(int device);

// Of what is in use, and of what is cached.
size_t memory_reserved(int device);
size_t memory_limit(int device);
void set_memory_limit(int device, size_t nbytes);

// Tensors carry addresses that the host cannot touch; here is where kernels find the same bytes.
char* for_kernels(const void* address);
// As that; nullptr where the address is of the host.
char* on_device(const void* address);

// As cudaHostRegister and cudaHostUnregister: the driver copies to and from the pages that are there now.
int host_register(uintptr_t address, size_t nbytes, unsigned flags);
int host_unregister(uintptr_t address);
size_t registrations_count();

// How the driver reaches memory of the host: nullopt where it knows nothing of it. Throws where a copy would touch
// more than one registration, or one and other memory.
std::optional<char*> registered(const void* address, size_t nbytes);
bool is_registered(const void* address);

// The error that a call has left behind, which the next launch of the thread finds; 0: none.
int take_last_error();

}  // namespace simulated
