/* Compares the forms of many tensors, and says where they are: 0.1 us each, where Python takes 0.35 and 0.2. Built if
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

#define HOST 1 /* kDLCPU */

typedef int (*Describe)(void *tensor, DLTensor *found);

extern void *PyList_GetItem(void *list, ptrdiff_t number); /* lends it */
extern int PyObject_HasAttr(void *object, void *name);

/* So many tensors ahead memory is fetched, first the object, then what it refers to, then the storage of that: most of
   the time would be spent waiting for it. Measured: with 4 to 16 it takes a third of the time. */
#define AHEAD 8
#define LINE 64
#define fetch(address) __builtin_prefetch(address)

/* The word of a tensor's object that refers to what torch describes it by, and the word of that which refers to its
   storage; 0: it is not known. */
static int implementation_word, storage_word;

/* The word of what torch describes a tensor by, and its bits that say that the values are the negatives or the conjugates
   of the bytes; no bits: they are not known. */
static int lazy_word;
static uint64_t lazy_bits;

void asyncckpt_learn(int implementation, int storage, int lazy, uint64_t bits) {
    implementation_word = implementation, storage_word = storage;
    lazy_word = lazy, lazy_bits = bits;
}

static inline int is_lazy(const char *tensor) {
    return lazy_bits && (((uint64_t **)tensor)[implementation_word][lazy_word] & lazy_bits) != 0;
}

static inline void fetch_ahead(void *list, ptrdiff_t i, ptrdiff_t count) {
    if (i + 3 * AHEAD < count)
        fetch(PyList_GetItem(list, i + 3 * AHEAD));
    if (!implementation_word)
        return;
    if (i + 2 * AHEAD < count) {
        char **object = PyList_GetItem(list, i + 2 * AHEAD), *its = object[implementation_word];
        fetch(its), fetch(its + LINE), fetch(its + 2 * LINE), fetch(its + 3 * LINE);
    }
    if (storage_word && i + AHEAD < count) {
        char **object = PyList_GetItem(list, i + AHEAD), **its = (char **)object[implementation_word];
        if (its)
            fetch(its[storage_word]), fetch(its[storage_word] + LINE);
    }
}

/* Describes number i of a list of tensors, which is returned; NULL: it cannot be, and Python has an exception. */
static inline void *describe_next(Describe describe, void *list, ptrdiff_t i, ptrdiff_t count, DLTensor *found) {
    fetch_ahead(list, i, count);
    void *tensor = PyList_GetItem(list, i);
    return tensor == NULL || describe(tensor, found) != 0 ? NULL : tensor;
}

static inline int64_t dtype_of(const DLTensor *its) {
    return (int64_t)its->code << 32 | (int64_t)its->bits << 16 | its->lanes;
}

/* Compares a tensor with an expected form, and goes on to the next one; NULL: it has another. */
static inline const int64_t *compare(const DLTensor *its, const int64_t *expected) {
    if (*expected++ != dtype_of(its) || *expected++ != its->ndim)
        return NULL;
    for (int32_t d = 0; d < its->ndim; d++)
        if (*expected++ != its->shape[d])
            return NULL;
    return expected;
}

/* Writes the form of each tensor of a list, one number for its dtype, one for its dimensions, and its shape, to found,
   which has room for them. Returns how many were described before the first that could not be, as Python's exception
   says. */
ptrdiff_t asyncckpt_forms(Describe describe, void *list, ptrdiff_t count, int64_t *found) {
    for (ptrdiff_t i = 0; i < count; i++) {
        DLTensor its;
        if (!describe_next(describe, list, i, count, &its))
            return i;
        *found++ = dtype_of(&its), *found++ = its.ndim;
        for (int32_t d = 0; d < its.ndim; d++)
            *found++ = its.shape[d];
    }
    return count;
}

/* Compares the forms of the tensors of a list with those expected. Returns how many are so, and have no attribute of a
   name, before the first that is not; Python has an exception then, if it could not be described. Notes in known on which
   device each is; adds to moved how many were not noted so before. */
ptrdiff_t asyncckpt_compared(Describe describe, void *list, ptrdiff_t count, const int64_t *expected, void *name,
                             int64_t *known, uint64_t *moved) {
    for (ptrdiff_t i = 0; i < count; i++) {
        DLTensor its;
        void *tensor = describe_next(describe, list, i, count, &its);
        if (!tensor || !(expected = compare(&its, expected)) || PyObject_HasAttr(tensor, name))
            return i;
        int64_t device = (int64_t)its.device_type << 32 | (uint32_t)its.device_id;
        *moved += known[i] != device;
        known[i] = device;
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

/* Writes the address of each tensor of a list to found, as long as they are the host's, if that is asked for, their
   elements are in a row, they are not known to be lazy, and they have the forms expected, if any are. Returns how many
   these are before the first that is not; Python has an exception then, if it could not be described. */
ptrdiff_t asyncckpt_addresses(Describe describe, void *list, ptrdiff_t count, const int64_t *expected, uint64_t *found,
                              int on_host) {
    for (ptrdiff_t i = 0; i < count; i++) {
        DLTensor its;
        void *tensor = describe_next(describe, list, i, count, &its);
        if (!tensor || (on_host && its.device_type != HOST) || !is_contiguous(&its) || is_lazy(tensor))
            return i;
        if (expected && !(expected = compare(&its, expected)))
            return i;
        found[i] = (uintptr_t)its.data + its.byte_offset;
    }
    return count;
}
