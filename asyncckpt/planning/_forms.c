/* Compares the forms of many tensors, and says where they are: 0.06 us each, where Python takes 0.25 and 0.2. Built if
   there is a compiler, and called by ctypes (forms.py), which keeps Python's lock.

   A tensor says what it is by DLPack's exchange API (its dlpack.h, version 1): a function of the framework's that fills
   a DLTensor and makes nothing. So this knows neither torch nor the insides of Python. */

#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef int (*Describe)(void *tensor, DLTensor *found);

extern void *PyList_GetItem(void *list, ptrdiff_t number); /* lends it */

/* So many tensors ahead memory is fetched: most of the time would be spent waiting for it. Measured: with 4 to 16 it takes
   half of the time. */
#define AHEAD 8
#define LINE 64
#define fetch(address) __builtin_prefetch(address)
#define fetch_referred(object, word) \
    (fetch((object)[word]), fetch((object)[word] + LINE), fetch((object)[word] + 2 * LINE))

/* In one of these words of its object each release of torch has what it describes a tensor by. Where it is elsewhere, this
   is of no use, and does no harm: nobody looks at what is fetched. */
#define fetch_described(object) (fetch_referred(object, 2), fetch_referred(object, 3))

static inline int describe_next(Describe describe, void *list, ptrdiff_t i, ptrdiff_t count, DLTensor *found) {
    if (i + AHEAD < count) {
        char **object = PyList_GetItem(list, i + AHEAD);
        fetch_described(object);
    }
    void *tensor = PyList_GetItem(list, i);
    return tensor == NULL || describe(tensor, found) != 0;
}

/* Writes the form of each tensor of a list, one number for its dtype, one for its dimensions, and its shape, to found,
   which has room for them; or, where found is NULL, compares them with those expected. Returns how many tensors were
   described and as expected before the first that was not; Python has an exception then, if it could not be described. */
ptrdiff_t asyncckpt_forms(Describe describe, void *list, ptrdiff_t count, const int64_t *expected, int64_t *found) {
    for (ptrdiff_t i = 0; i < count; i++) {
        DLTensor its;
        if (describe_next(describe, list, i, count, &its))
            return i;
        int64_t dtype = (int64_t)its.code << 32 | (int64_t)its.bits << 16 | its.lanes;
        if (found) {
            *found++ = dtype, *found++ = its.ndim;
            for (int32_t d = 0; d < its.ndim; d++)
                *found++ = its.shape[d];
            continue;
        }
        if (*expected++ != dtype || *expected++ != its.ndim)
            return i;
        for (int32_t d = 0; d < its.ndim; d++)
            if (*expected++ != its.shape[d])
                return i;
    }
    return count;
}

static inline int is_contiguous(const DLTensor *its) {
    int64_t elements = 1;
    int is_dense = 1;
    for (int32_t d = its->ndim - 1; d >= 0; d--) {
        is_dense &= its->strides == NULL || its->shape[d] == 1 || its->strides[d] == elements;
        elements *= its->shape[d];
    }
    return is_dense || elements == 0;
}

/* Writes the address of each tensor of a list to found, as long as its elements are in a row. Returns how many these are
   before the first that was not; Python has an exception then, if it could not be described. Notes in known, two words
   for each, which object it is, and its address; adds to changed how many were not noted so before. */
ptrdiff_t asyncckpt_addresses(Describe describe, void *list, ptrdiff_t count, uint64_t *found, uint64_t *known,
                              uint64_t *changed) {
    for (ptrdiff_t i = 0; i < count; i++, known += 2) {
        DLTensor its;
        if (describe_next(describe, list, i, count, &its) || !is_contiguous(&its))
            return i;
        uint64_t object = (uintptr_t)PyList_GetItem(list, i), address = (uintptr_t)its.data + its.byte_offset;
        *changed += known[0] != object || known[1] != address;
        known[0] = object, known[1] = found[i] = address;
    }
    return count;
}
